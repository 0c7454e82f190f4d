"""The decode loop in fixed shapes, so that a whole step can be compiled."""
