import specdec

dec = specdec.load("smollm2", method="talon")
out = dec.generate("Why is the sky blue?", max_new_tokens=64)
print(out.text)

told = out.summary()  # tau: tokens per target pass; delta: draft passes per target pass; where the time went
print(f"{told['tau']:.2f} tokens a pass, {told['tokens_per_second']:.1f} tokens/s, lossless: {out.exact}")
