"""Two forwards a cycle over the same masks (UNO, arXiv 2609.04010): the first drafts, the second verifies.

`MarsVerified` does both in one forward, which therefore carries masks wherever drafts may turn out to be wrong, or
drafts in vain. Here no mask ever stands behind a draft, so each forward is narrow, and there are twice as many.
"""

from dataclasses import dataclass, field

from marsbench.decoding.generation import Layout
from marsbench.decoding.rows import Accepted, Rows
from marsbench.forward.window import Answer, Window
from marsbench.methods.mars_verified import MarsVerified


@dataclass(frozen=True)
class Uno(MarsVerified):
    """A cycle settles at most `window` + 1 tokens by two forwards of `window` positions each.

    The first has the last token, whose answer, the model's own, counts at once, and W - 1 masks behind it. The second
    has that answer and what the masks have guessed, all of it verified. Rows of a batch may be at different halves.
    """

    name = "uno"

    layout: Layout = field(default="linear", init=False)
    groups: int | None = field(default=1, init=False)  # in a line there is one, or none where drafts stand

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The right drafts and the token after them; masks stand in the next window where nothing is drafted."""
        accepted, rows.drafts, _, room = self.read(rows, answer)
        rows.drafted = room.clamp(max=self.window - 1)
        rows.groups = rows.drafted.gt(0).long() - 1
        return accepted
