"""Folders of images: opened one at a time; what is damaged is named, what differs is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from whynan.forensics.addresses import Place, Unreadable, one_line
from whynan.forensics.data.marks import FIRST
from whynan.forensics.data.tables import need
from whynan.forensics.findings import Checked, Finding, Kind, Severity
from whynan.forensics.wishes import Wishes
from whynan.records import Json, count

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
_DEPTH = 4
_LARGE = 1 << 24
_MASKS = re.compile(r"mask|label|annot|segm|ground.?truth|(^|[/_-])gt([/_.-]|$)")  # pictures of classes may well be of one
_FRAMES = 64  # of a float TIFF that are looked at


@dataclass(slots=True)
class Named:
    """Images that share a fault: how many, and the first few by number and name."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, row: int, name: str) -> None:
        self.count += 1
        if len(self.rows) < FIRST:
            self.rows.append(row)
            self.names.append(name)


@dataclass(slots=True)
class Album:
    """What was seen in a folder of images."""

    damaged: Named = field(default_factory=Named)
    bad: Named = field(default_factory=Named)
    plain: Named = field(default_factory=Named)
    repeated: Named = field(default_factory=Named)
    sizes: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)
    seen: dict[int, tuple[int, str]] = field(default_factory=dict)
    bytes: int = 0


def images_in(place: Place, depth: int = 0) -> Iterator[Place]:
    """Yield the images of a folder and of the folders in it, sorted by name; folders that are links are not followed."""
    import os

    for child in place.children():
        if child.suffix in SUFFIXES and not child.name.startswith("."):
            yield child
        elif depth < _DEPTH and child.is_dir() and not (not child.remote and os.path.islink(child.address)):
            yield from images_in(child, depth + 1)


def check_images(place: Place, wishes: Wishes) -> Checked:
    """Check every image of a folder, or one image.

    Cost: every image is decoded once, one at a time.
    """
    library = need("PIL.Image", "reading images", "pillow")
    need("numpy", "reading images")
    album, rows = Album(), 0
    for image in images_in(place) if place.is_dir() else (place,):
        _look(library, album, rows, image, image.address.removeprefix(place.address).strip("/") or place.name, wishes)
        rows += 1
    if not rows:
        raise Unreadable("a folder without images")
    facts: dict[str, Json] = {"rows": rows, "sizes": {**album.sizes}, "modes": {**album.modes}, "folders": {**album.folders}}
    return Checked(str(place), Kind.DATA, f"{rows} images", album.bytes, findings=tuple(_judge(album, rows)), facts=facts)


def _look(library: Any, album: Album, row: int, image: Place, name: str, wishes: Wishes) -> None:
    try:
        size = image.size()
        album.bytes += size
        with image.open() as file:
            key, plain, bad, seen, mode = _decode(library, file, size)
        wishes.tick(size)
    except Exception as error:  # a decoder raises whatever it likes on damaged input
        album.damaged.add(row, f"{name}: {_reason(error)}")
        return
    album.sizes[seen] += 1
    album.modes[mode] += 1
    album.folders[name.rsplit("/", 1)[0] if "/" in name else "."] += 1
    if bad:
        album.bad.add(row, name)
    if plain:
        if not _MASKS.search(name.lower()):
            album.plain.add(row, name)
    elif key in album.seen:
        album.repeated.add(row, f"{name} is {album.seen[key][1]}")
    elif len(album.seen) < 1_000_000:
        album.seen[key] = (row, name)


def _reason(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    text = one_line(error)
    return f"more pixels than Pillow allows ({text.split('(')[-1].split(' ')[0]})" if "decompression bomb" in text else text


def _decode(library: Any, file: IO[bytes], size: int) -> tuple[int, bool, bool, str, str]:
    """Return a hash of the pixels, whether they are all alike, whether any is not finite, size and mode."""
    import hashlib
    import warnings

    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("error", library.DecompressionBombWarning)
        image = library.open(file)
        _refuse_empty_promise(image, size)
        image.load()
    pixels = np.asarray(image)
    key, plain = hash((image.mode, image.size, hashlib.blake2b(np.ascontiguousarray(pixels).data).digest())), _plain(pixels)
    bad = pixels.dtype.kind == "f" and not (np.isfinite(pixels).all() and _other_frames_finite(image))
    return key, plain, bad, f"{image.width}x{image.height}", str(image.mode)


def _refuse_empty_promise(image: Any, size: int) -> None:
    """No usual format packs a picture this tightly: a damaged header must not make us hold what is not there."""
    held = image.width * image.height * len(image.getbands()) * (4 if image.mode in "FI" else 1)
    if held > _LARGE and held > 2000 * size:
        raise Unreadable(f"declares {image.width} x {image.height} pixels in {size} bytes")


def _other_frames_finite(image: Any) -> bool:
    import numpy as np

    for frame in range(1, min(getattr(image, "n_frames", 1), _FRAMES)):
        image.seek(frame)
        if not np.isfinite(np.asarray(image)).all():
            return False
    return True


def _plain(pixels: Array) -> bool:
    return pixels.size > 0 and pixels.shape[0] * pixels.shape[1] > 1 and bool((pixels == pixels[:1, :1]).all())


def _judge(album: Album, rows: int) -> Iterator[Finding]:
    if album.damaged.count:
        yield _finding(Severity.BAD, "damaged-image", album.damaged, rows, "cannot be read")
    if album.bad.count:
        yield _finding(Severity.BAD, "not-finite", album.bad, rows, "hold nan or inf", "WN701")
    if album.plain.count:
        yield _finding(Severity.SUSPECT, "one-colour", album.plain, rows, "are of one colour: their spread is 0")
    if album.repeated.count:
        yield _finding(
            Severity.SUSPECT if album.repeated.count * 200 >= rows else Severity.NOTE, "duplicate-rows", album.repeated, rows, "repeat an earlier one"
        )
    for what, seen in (("sizes", album.sizes), ("modes", album.modes)):
        if len(seen) > 1:
            listed = ", ".join(f"{count(n)} of {kind}" for kind, n in seen.most_common(4))
            yield Finding(Severity.NOTE, f"different-{what}", f"{len(seen)} different {what}: {listed}")


def _finding(severity: Severity, what: str, named: Named, rows: int, text: str, code: str = "") -> Finding:
    more = f" and {count(named.count - 3)} more" if named.count > 3 else ""
    message = f"{count(named.count)} of {count(rows)} images {text}: {'; '.join(named.names[:3])}{more}"
    return Finding(severity, what, message, code=code, rows=tuple(named.rows), row_count=named.count, values={"names": list(named.names)})
