"""Running: what a page's lines are, and how what is missing of them is trained, answered and scored."""
