"""Regime: does a scale stand where the paper stands, by criteria that look at AR training and untrained masks alone?"""

from marsbench.studies.regime.page import STUDY as STUDY
