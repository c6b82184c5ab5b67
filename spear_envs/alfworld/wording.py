"""The wording of a game: the few points in which releases of ALFWorld's data differ."""

from __future__ import annotations

from dataclasses import dataclass

_HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


@dataclass(frozen=True, slots=True)
class Wording:
    """The points in which game files differ; all other words are the same in every file."""

    put: tuple[str, str]
    """Words before the object and between object and receptacle in the command: ``("move ", " to ")``."""
    put_feedback: tuple[str, str]
    """The same in the feedback: ``("You move the ", " to the ")``."""
    arrive_at_location: bool
    """Whether going somewhere names the location (``You arrive at loc 12.``) instead of the receptacle."""
    help: str | None
    """Answer to ``help``; None if the command does not exist."""
    sinks: frozenset[str]
    """Types of receptacles that clean."""


WORDING_2_1_2 = Wording(
    put=("move ", " to "),
    put_feedback=("You move the ", " to the "),
    arrive_at_location=False,
    help=_HELP,
    sinks=frozenset({"sinkbasintype"}),
)
"""Release 2.1.2, which alfworld 0.4.2 downloads, and synthetic games."""
