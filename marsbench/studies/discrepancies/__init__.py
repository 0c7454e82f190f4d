"""Discrepancies: where the paper and its released code differ, and what each difference comes to."""

from marsbench.studies.discrepancies.page import STUDY as STUDY
