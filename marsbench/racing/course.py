"""The course that all contenders of a grid run: their models, loaded once, the prompts, the questions behind them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance

from marsbench.answering import Answering, default_ids
from marsbench.compiled.graphs import Graphs, records_on, why_not
from marsbench.decoding.engine import Method, OutsideMethod
from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark, benchmarks
from marsbench.evaluation.harness import Exam, LoggedAnswer, cut_in_words, evaluate, prepare, without_beginning
from marsbench.forward.limits import room_for_prompt
from marsbench.forward.native import VARIABLE
from marsbench.keys import content_hash, versions
from marsbench.line import Line, TrainedStage
from marsbench.methods import METHODS
from marsbench.methods.carried import carried_over
from marsbench.provenance import products, provenance
from marsbench.racing.grid import Grid, draws_of
from marsbench.racing.profile import profile
from marsbench.racing.race import Outcome, Race
from marsbench.racing.step_time import step_times
from marsbench.rows.kinds import TrainingRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded, default_device


@dataclass(frozen=True)
class Question:
    benchmark: str
    doc_id: int  # its number in the benchmark's data
    prompt: str  # in the chat template, up to where the assistant begins


@dataclass
class Questions:
    """As many questions of every benchmark, in turn: question i is of benchmark i modulo their number."""

    exams: Mapping[str, Exam]
    questions: list[Question]
    _scores: dict[tuple[str, int, str], float] = field(default_factory=dict)  # (benchmark, doc_id, response) -> score

    def prompts(self, tokenizer: Any, room: int) -> "Prompts":
        """The prompts as token ids; of those longer than `room` tokens, the end."""
        whole = tokenizer([question.prompt for question in self.questions], add_special_tokens=False).input_ids
        cut = [without_beginning(ids, room) for ids in whole]
        return Prompts([ids for ids, _ in cut], [count for _, count in cut])

    def score(self, responses: Sequence[str]) -> list[float]:
        """The accuracy of each question's response, 0 or 1; a response is scored once, however often it comes."""
        for name, exam in self.exams.items():
            new = {
                question.doc_id: LoggedAnswer(question.doc_id, response)
                for question, response in zip(self.questions, responses, strict=True)
                if question.benchmark == name and (name, question.doc_id, response) not in self._scores
            }
            if new:
                scored = evaluate(exam.only(new), new)
                for answer, correct in zip(scored.answers, scored.correct, strict=True):
                    self._scores[name, answer.doc_id, answer.response] = correct
        answered = zip(self.questions, responses, strict=True)
        return [self._scores[question.benchmark, question.doc_id, response] for question, response in answered]

    def fingerprint(self) -> str:
        """The `content_hash` of the prompts and all that decides their scores."""
        tasks = {name: exam.fingerprint for name, exam in self.exams.items()}
        return content_hash([tasks, [vars(question) for question in self.questions]])


def ask(names: Sequence[str], count: int, tokenizer: Any, data_dir: Path | None = None) -> Questions:
    """`count` questions from all benchmarks alike, in a chat template; `UserError` where there are not so many."""
    each = per_benchmark(count, names)
    exams = {name: prepare(benchmark(name), data_dir).first(each) for name in names}
    of_each = list[list[Question]]()
    for name, exam in exams.items():
        if len(exam.question_numbers()) < each:
            raise UserError(f"{name} has {len(exam.question_numbers())} questions, not {each}", fix="ask fewer prompts")
        of_each.append([Question(name, number, text) for number, text in sorted(prompts_of(exam, tokenizer).items())])
    return Questions(exams, [question for in_turn in zip(*of_each, strict=True) for question in in_turn])


class Prompts(NamedTuple):
    ids: list[list[int]]
    cuts: list[int]  # of each, the tokens that the context had no room for


def per_benchmark(count: int, names: Sequence[str]) -> int:
    """How many of `count` questions fall to each benchmark; `UserError` where they cannot be shared alike."""
    each, rest = divmod(count, len(names))
    if rest or not each:
        raise UserError(f"{len(names)} benchmarks cannot share {count} prompts", fix=f"ask a multiple of {len(names)}")
    return each


def prompts_of(exam: Exam, tokenizer: Any) -> dict[int, str]:
    prompts, answers = dict[int, str](), dict[int, LoggedAnswer]()

    def note(requests: Mapping[int, Instance]) -> None:
        for number, request in requests.items():
            prompts[number], answers[number] = request.args[0], LoggedAnswer(number, "")

    evaluate(exam, answers, tokenizer, note)
    return prompts


Load = Callable[[str, int, torch.dtype], Loaded]  # stage, block size -> its model; `UserError` where there is none


class Cell(NamedTuple):
    line: Line
    batch_size: int
    key: str


class Course:
    def __init__(self, run: Run, grid: Grid, load: Load | None = None) -> None:
        """Take the contenders' models from `load`, or else from the run's checkpoints, trained where need be."""
        self.run, self.grid = run, grid
        self._dtype: torch.dtype = getattr(torch, grid.dtype)
        self._checkpoints = Checkpoints(run)
        # As keys call them.
        self._backend = grid.backend or ("eager" if records_on(torch.device(default_device())) else "inductor")
        self._load = cache(load or self._checkpoint)
        # By steps: what was compiled at one batch size serves at the next, and at one threshold for all.
        self._compiled: dict[str, tuple[Method | OutsideMethod, Graphs]] = {}
        self.benchmarks = benchmarks(grid.benchmarks or run.benchmarks or run.scale.benchmarks)
        self.max_new_tokens = grid.max_new_tokens or max(map(run.answer_limit, self.benchmarks))
        per_benchmark(grid.prompts, self.benchmarks)  # refuses what cannot be shared, before anything is trained

    def trainings(self) -> list[TrainingRow]:
        return self._checkpoints.rows(self.grid.checkpoints, now=True)

    def _checkpoint(self, stage: str, block_size: int, dtype: torch.dtype) -> Loaded:
        trained = TrainedStage.of(stage, block_size)
        if reason := self._checkpoints.missing(trained):
            raise UserError(reason)
        return self._checkpoints.load(trained, dtype)

    # ---- who runs ----

    def target(self, line: Line) -> Loaded:
        return self._load(line.stage, line.block_size, self._dtype)

    def draft(self, line: Line) -> Loaded | None:
        return self._load(line.draft.stage, line.block_size, self._dtype) if line.draft else None

    def entrant(self, line: Line, batch_size: int) -> Answering:
        if METHODS[line.method].one_row and batch_size > 1:
            raise UserError(f"{line.method} decodes one sequence at a time", fix="race it at batch size 1")
        loaded = self.target(line)
        eager = Answering.of_line(replace(line, compiled=False), loaded, self.draft(line), batch_size=batch_size)
        if line.carried:
            draws = draws_of(line.carried, self.run.seed)
            eager = replace(eager, method=carried_over(eager.method, draws, loaded.model.device))
        if not line.compiled:
            return eager
        if reason := why_not(loaded.model, eager.method, self.grid.backend):
            raise UserError(f"it cannot be compiled: {reason}", fix="race it without `compiled`")
        method, graphs = self._compiled.setdefault(_steps_of(line), (eager.method, Graphs(self.grid.backend)))
        return replace(eager, method=method, kind=graphs.batch)

    def compiling(self, line: Line) -> dict[str, Any]:
        if not line.compiled:
            return {}
        _, graphs = self._compiled[_steps_of(line)]
        return {"graphs": len(graphs), "compile_seconds": round(graphs.compile_seconds, 3)}

    def weights(self, line: Line) -> dict[str, Any]:
        try:
            draft = self.draft(line)
            return {"target": self.target(line).weights, "draft": draft.weights if draft else None}
        except UserError:
            return {}

    # ---- what the contenders share ----

    @property
    def plain(self) -> Line:
        contenders: tuple[Line, ...] = self.grid.contenders
        return next(line for line in contenders if line.name == "ar")

    @property
    def baseline(self) -> Loaded:
        """The checkpoint of `ar`, whose tokenizer writes the prompts for all."""
        return self.target(self.plain)

    @cached_property
    def questions(self) -> Questions:
        return ask(self.benchmarks, self.grid.prompts, self.baseline.tokenizer, self.run.data_dir)

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts as token ids; what the context has no room for is said."""
        asked = self.questions.prompts(self.baseline.tokenizer, self._room)
        for place, name in enumerate(self.questions.exams):
            self.run.reporter.say_once(cut_in_words(name, asked.cuts[place :: len(self.questions.exams)], self._room))
        return asked

    @property
    def _room(self) -> int:
        return room_for_prompt(self.baseline.model, self.max_new_tokens)

    @cached_property
    def everywhere(self) -> dict[str, Any]:
        origin = provenance(seed=self.run.seed)
        return {
            "versions": versions("decoding", "timing"),
            "machine": [origin["hardware"], origin["threads"], origin["versions"]["torch"]],
            "dtype": self.grid.dtype,
            **products(self.grid.dtype),
            "repeats": self.grid.repeats,
            "max_new_tokens": self.max_new_tokens,
            "questions": self.questions.fingerprint(),
            **({"packed": False} if os.environ.get(VARIABLE) == "0" else {}),
        }

    # ---- its cells ----

    def cells(self, batch_size: int) -> list[Cell]:
        keyed = []
        for line in self.grid.contenders:
            content = {"kind": "sweep", "entry": line.keyed, "batch_size": batch_size, **self.weights(line)}
            content |= {**self.everywhere, **({"backend": self._backend} if line.compiled else {})}
            content |= {"profiled": True} if self.grid.profiled else {}
            keyed.append(Cell(line, batch_size, content_hash(content)))
        return keyed

    def why_not(self, cell: Cell) -> str:
        try:
            self.entrant(cell.line, cell.batch_size)
        except UserError as error:
            return error.reason
        tokenizer = self.target(cell.line).own_tokenizer
        if tokenizer is not None and self.questions.prompts(tokenizer, self._room) != self.prompts:
            return "its tokenizer reads the prompts otherwise than that of `ar`"
        return ""

    def race(self, cells: Sequence[Cell], laps: int | None = None) -> Race:
        """The race of some contenders at one batch size, of so many timed laps; None = as many as the grid says."""
        contenders = {cell.line.name: self.entrant(cell.line, cell.batch_size) for cell in cells}
        laps = self.grid.repeats if laps is None else laps
        decoded = self.prompts.ids, cells[0].batch_size, self.max_new_tokens, *default_ids(self.baseline)
        return Race(contenders, *decoded, laps, self.grid.timeout_s)

    def profile(self, cell: Cell) -> dict[str, float]:
        if not self.grid.profiled or cell.line.compiled or METHODS[cell.line.method].own_loop:
            return {}
        return profile(self.entrant(cell.line, cell.batch_size), self.race([cell]))

    def responses(self, raced: Outcome) -> list[str]:
        tokenizer: Any = self.baseline.tokenizer
        return [str(tokenizer.decode(generation.tokens, skip_special_tokens=True)) for generation in raced.generations]

    def step_times(self) -> dict[str, Any]:
        with self.run.reporter.bar("timing forward passes by their shape") as bar:
            return step_times(self.baseline.model, self.grid.positions, bar.update)


def _steps_of(line: Line) -> str:
    return content_hash({**line.keyed, "name": "", "threshold": None})
