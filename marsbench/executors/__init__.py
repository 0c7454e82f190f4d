"""Who carries out a graph of tasks: processes on this machine, or a cluster."""
