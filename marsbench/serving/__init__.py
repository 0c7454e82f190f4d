"""MARS behind an API: a process that decodes one batch, and one that speaks HTTP as OpenAI's clients expect it."""
