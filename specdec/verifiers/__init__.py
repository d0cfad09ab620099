"""Who decides which drafted tokens stay."""
