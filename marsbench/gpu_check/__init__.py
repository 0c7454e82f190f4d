"""Is this GPU fit for marsbench? Checks of what is right, what is fast and what fits, and the page on them."""
