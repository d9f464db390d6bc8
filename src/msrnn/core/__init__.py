"""The recurrence itself, in PyTorch: the definition, the slots, reading in chunks. Knows no model and no framework."""
