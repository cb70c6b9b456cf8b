"""Texts, vocabularies, and the embedded corpus."""
