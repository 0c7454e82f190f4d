"""Figure 1: an answer with the tokens of one forward pass shaded together."""

from marsbench.studies.figure1.page import STUDY as STUDY
