"""Rendering: Markdown and figures that pages share, as pure functions of rows. The same rows give the same bytes."""
