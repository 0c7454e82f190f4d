"""Compiled steps: what does a step as one graph buy, for `ar` and MARS alike, and what bounds it?"""

from marsbench.studies.compiled.page import STUDY as STUDY
