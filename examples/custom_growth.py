"""A growth policy of your own, a beam; nothing has to be registered or inherited."""

from dataclasses import dataclass

import torch
from specdec_kernels import confidence_gate

import specdec


@dataclass(frozen=True)
class Beam:
    """The best `width` paths at each of `depth` levels."""

    width: int = 3
    depth: int = 3

    @property
    def capacity(self):
        return 1 + self.width * self.depth

    def grow(self, tree, nodes, logits, noise):  # frontier [B, W] (-1 = nobody), draft logits [B, W, V]
        scores = torch.where(nodes >= 0, tree.scores.gather(1, nodes.clamp(min=0)), float("-inf"))
        room = torch.full_like(tree.count, self.width)
        at, token, score, count = confidence_gate(logits, scores, 0.0, room, self.width)
        columns = torch.arange(self.width, device=token.device).expand_as(token)
        more = count * (tree.depth + 1 < self.depth)
        return specdec.Layer(nodes.gather(1, at), token, score, count, columns, more)

    def finish(self, tree):
        return tree


dec = specdec.load("smollm2", method="talon")
beam = specdec.Decoder(dec.target, drafter=dec.drafter, growth=Beam(), tokenizer=dec.tokenizer, method="beam")
prompt = "The three laws of motion are"
out, plain = (decoder.generate(prompt, max_new_tokens=48) for decoder in (beam, dec))
print(f"tau {out.summary()['tau']:.2f}, the same text as talon's: {out.tokens == plain.tokens}")
