import specdec

dec = specdec.load("smollm2", method="talon")
messages = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
for piece in dec.stream(messages, max_new_tokens=64, temperature=0.7, top_p=0.9, seed=1):
    print(piece.text, end="", flush=True)  # what one round added: accepted draft tokens and one of the target's own
print(f"\n{len(piece.output.tokens)} tokens in {len(piece.output.rounds)} target passes")
