"""What a file or folder holds: a checkpoint, data or a log, decided by what is in it."""

from __future__ import annotations

import re
from itertools import islice
from types import ModuleType

from whynan.forensics import data, logs
from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.checkpoints.contents import BARE, Contents
from whynan.forensics.checkpoints.members import is_candidate
from whynan.forensics.findings import Kind
from whynan.forensics.nets import net

_WEIGHT_LIKE = re.compile(
    r"weight|bias|running_|exp_avg|momentum|kernel|embed|layer|lora|norm|conv|attn|mlp|param|state|optim|gamma|beta|block|encoder|decoder|\d+\."
)
_DATA_WORD = re.compile(
    r"(^|[^a-z0-9])(x|y|inputs?|ids|tokens?|labels?|targets?|images?|data|features?|embeddings|mask|train|test|val|valid|pixels?|audio|samples|classes)([^a-z0-9]|$)"
)
_TRAINED_WORD = re.compile(
    r"(^|[._])(model|net|network|module|ema|generator|discriminator|epochs?|(global_)?step|iter(ation)?|lr|learning_rate|best\w*|sched\w*|scaler)([._]|$)"
)
_LOOKED_AT = 64  # files of a folder that are asked what they are before it is taken for one thing


def kind_of(place: Place) -> Kind | None:
    """Say what a path holds, or None. A file that both a checkpoint and data could be is decided by its tensors.

    Cost: the beginning of the file is read, and the table of its tensors.
    """
    from whynan.forensics.checkpoints.opening import recognise

    checkpoint = recognise(place) is not None
    if checkpoint or (is_candidate(place) and not place.is_dir()):
        return Kind.DATA if checkpoint and _opens_as_data(place) else Kind.CHECKPOINT
    if not place.is_dir() and _known(logs, place):
        return Kind.LOG
    return Kind.DATA if _known(data, place) and not _is_mixed(place) else None


def _is_mixed(place: Place) -> bool:
    """Whether a folder of data holds something else beside it: a run that keeps its log with its tables."""
    if not place.is_dir():
        return False
    return any(not c.is_dir() and kind_of(c) in (Kind.LOG, Kind.CHECKPOINT) for c in islice(place.children(), _LOOKED_AT))


def may_be_member(place: Place) -> bool:
    """Whether something that lies in a folder is a checkpoint; a bare pickle may be anything, unless it is called like one."""
    from whynan.forensics.checkpoints.opening import recognise

    return kind_of(place) is Kind.CHECKPOINT and (is_candidate(place) or recognise(place) != "pickle")


def may_be_read(place: Place) -> bool:
    """Whether something can be read as a checkpoint, be it rows of data or not."""
    from whynan.forensics.checkpoints.opening import recognise

    return recognise(place) is not None or (is_candidate(place) and not place.is_dir())


def _known(room: ModuleType, place: Place) -> bool:
    try:
        return room.recognise(place) is not None
    except Unreadable:
        return False


def _opens_as_data(place: Place) -> bool:
    from whynan.forensics.checkpoints.opening import open_checkpoint

    try:
        with net():
            return not place.is_dir() and holds_data(open_checkpoint(place))
    except Unreadable:
        return False


def holds_data(contents: Contents) -> bool:
    """Whether tensors are rows of a data set: of one length, named like data or not at all, and none named like a weight."""
    names = [e.name.lower() for e in contents.entries]
    everything = (*names, *map(str.lower, contents.values))
    if any(_WEIGHT_LIKE.search(n) or _TRAINED_WORD.search(n) for n in everything) or any(n.startswith("dangerous:") for n in contents.notes):
        return False
    if len(names) > 2 and all(n.isdigit() for n in names) and all(len(e.shape) == 1 for e in contents.entries):
        return True  # samples, each of its own length
    lengths = {e.shape[0] if e.shape else 0 for e in contents.entries}
    named_so = names == [BARE] or all(n.isdigit() for n in names) or any(_DATA_WORD.search(n) for n in names)
    return len(lengths) == 1 and max(lengths) > 1 and named_so
