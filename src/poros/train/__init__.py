"""How an adapter learns: data, the bare step, and the trainer."""
