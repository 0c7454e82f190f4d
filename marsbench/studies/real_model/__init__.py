"""Real model: what do masks, an adapter and the text so far buy on a model that people use, by the clock too?"""

from marsbench.studies.real_model.page import STUDY as STUDY
