"""Training a T5, and distilling a draft from it."""
