"""Whether other processes use this machine: what is timed beside other work is a timing of the scheduler."""

from __future__ import annotations

BUSY_CORES = 0.1  # what others may use before it is worth a word


def others_cores(seconds: float = 0.5) -> float | None:
    """How many cores are busy while this process rests for so many seconds; None where the system does not tell."""
    try:
        import psutil

        return round(float(psutil.cpu_percent(seconds)) * float(psutil.cpu_count()) / 100, 2)
    except Exception:  # psutil is missing, or raises its own on a system that hides such numbers
        return None


def warning(used: float | None) -> str:
    """One line for what is timed while others use so many cores; empty where that is next to nothing, or not known."""
    if used is None or used <= BUSY_CORES:
        return ""
    return f"this machine is not idle: other processes use {used:.2f} cores; times will be the scheduler's, too"
