import specdec

dec = specdec.load("smollm2", method="talon")
questions = ["What is a prime number?", "Name three rivers in Europe.", "Write a haiku about rain."]
chats = [[{"role": "user", "content": question}] for question in questions]
for question, out in zip(questions, dec.generate(chats, max_new_tokens=32), strict=True):  # one decoder, one batch
    print(f"{question}\n  {out.text.strip()} [{out.finish_reason}]")
