"""What studies have to say on the pages about the whole paper."""

from __future__ import annotations

from marsbench.findings.collection import Collection
from marsbench.studies import studies


def remarks(collection: Collection) -> list[str]:
    """Every study's remark on the rows of one scale."""
    found = [study.remark(collection.of(study.key)) for study in studies().values()]
    return [remark for remark in found if remark]
