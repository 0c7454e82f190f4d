"""Engine: are the lossless methods exact, and where does the time of a step go?"""

from marsbench.studies.engine.page import STUDY as STUDY
