"""What numbers may be said to say: intervals, paired differences, verdicts. Nothing here can change a measured row."""
