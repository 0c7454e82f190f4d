"""Studies: a module or folder for each page of results, with everything about it. This registry finds them.

A study is a `Study` that has a name in its module: `STUDY`, or one for each of several that stand on one page.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from marsbench.errors import unknown_name
from marsbench.findings.claims import Claim
from marsbench.findings.collection import Query
from marsbench.studies.study import Item, Study

_KINDS = ("table", "figure", "appendix")  # of what the paper numbers, in the order in which they are listed


@cache
def studies() -> dict[str, Study]:
    """Key -> study, in the order of the paper, our own pages last."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    every = [value for module in modules for value in vars(module).values() if isinstance(value, Study)]
    return {study.key: study for study in sorted(every, key=lambda study: _place(study.key, study.order))}


def studies_on(page: str) -> list[Study]:
    """The studies of a page: the leading one, the one that names it, then the others."""
    here = [study for study in studies().values() if study.page == page]
    return sorted(here, key=lambda study: (not study.leads, study.key != page))


def studies_of_paper() -> list[Study]:
    return [study for study in studies().values() if study.in_paper]


def items() -> list[Item]:
    """All names that `reproduce` knows, in the order of the paper: studies, and the items on their pages."""
    known: list[Item] = [item for study in studies().values() if study.is_made for item in (study, *study.holds)]
    return sorted(known, key=lambda item: _place(item.key, item.order))


def study_of(name: str) -> Study:
    """The study with that key, or the study whose page has the item with that key; else a `UserError`."""
    for study in studies().values():
        if name in (study.key, *[item.key for item in study.holds]):
            return study
    raise unknown_name("thing to reproduce", name, [*[item.key for item in items()], "all"])


def claims() -> list[Claim]:
    return [claim for study in studies().values() for claim in (*study.prose_claims, *study.claims) if claim.text]


def queries() -> dict[str, Query]:
    return {key: study.query for key, study in studies().items()}


def _place(key: str, order: int) -> tuple[int, int, int, str]:
    """Sorts by what the paper numbers: its tables, figures and appendices, then our own pages by their `order`."""
    kind = next((rank for rank, kind in enumerate(_KINDS) if key.startswith(kind)), len(_KINDS))
    return kind, int("".join(filter(str.isdigit, key)) or 0), order, key
