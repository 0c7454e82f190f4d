"""Gains: where MARS's gain comes from, and what is left of it at equal accuracy, which the paper did not test."""

from marsbench.studies.gains.page import STUDY as STUDY
