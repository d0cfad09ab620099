"""Who proposes tokens: a network as its checkpoint has it, behind `observe` and `expand`."""
