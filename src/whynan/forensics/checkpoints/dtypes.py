"""What the bits of a number mean, for every dtype of torch, without torch.

A float is told by its bit pattern: the sign apart, a larger pattern is a larger number, so the least and the greatest pattern of a
piece, taken as signed and as unsigned integers, say whether it is finite, whether it holds a zero, and what its finite range is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum


class Sort(StrEnum):
    """How a pattern is read."""

    FLOAT = "float"  # sign and magnitude
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    TABLE = "table"  # one byte, looked up


@dataclass(frozen=True, slots=True)
class Format:
    """One dtype."""

    name: str
    width: int  # bytes of one number
    sort: Sort
    lanes: int = 1  # numbers in one element: 2 for complex
    top: int = 0  # FLOAT: the greatest finite magnitude; above it lie infinity (where there is one) and NaN
    infinite: bool = True  # FLOAT: top + 1 is infinity
    table: tuple[tuple[float, ...], ...] = ()  # TABLE and one-byte floats: the numbers a byte stands for

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return self.width * self.lanes


def value(form: Format, magnitude: int) -> float:
    """The number a positive pattern stands for.

    >>> value(FORMATS["bfloat16"], 0x3F80), value(FORMATS["float8_e4m3fn"], 0x7E)
    (1.0, 448.0)
    """
    if form.table:
        return form.table[magnitude][0]
    if form.name == "bfloat16":
        magnitude, form = magnitude << 16, FORMATS["float32"]
    code = {2: "e", 4: "f", 8: "d"}[form.width]
    return float(struct.unpack(f"<{code}", magnitude.to_bytes(form.width, "little"))[0])


def _small(bits: int, exponent_bits: int, bias: int) -> float:
    """A one-byte float, its special patterns apart."""
    mantissa_bits = 7 - exponent_bits
    mantissa, exponent = bits & ((1 << mantissa_bits) - 1), (bits & 0x7F) >> mantissa_bits
    fraction = mantissa / (1 << mantissa_bits)
    size = fraction * 2.0 ** (1 - bias) if not exponent else (1 + fraction) * 2.0 ** (exponent - bias)
    return -size if bits & 0x80 else size


def _byte_table(exponent_bits: int, bias: int, special: dict[int, float]) -> tuple[tuple[float, ...], ...]:
    return tuple((special.get(b, _small(b, exponent_bits, bias)),) for b in range(256))


_NAN, _INF = float("nan"), float("inf")
_E5M2 = {s | m: (_NAN if m > 0x7C else -_INF if s else _INF) for s in (0, 0x80) for m in (0x7C, 0x7D, 0x7E, 0x7F)}
_FOUR = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _formats() -> dict[str, Format]:
    floats = [
        Format("float64", 8, Sort.FLOAT, top=0x7FEFFFFFFFFFFFFF),
        Format("float32", 4, Sort.FLOAT, top=0x7F7FFFFF),
        Format("bfloat16", 2, Sort.FLOAT, top=0x7F7F),
        Format("float16", 2, Sort.FLOAT, top=0x7BFF),
        Format("float8_e5m2", 1, Sort.FLOAT, top=0x7B, table=_byte_table(5, 15, _E5M2)),
        Format("float8_e4m3fn", 1, Sort.FLOAT, top=0x7E, infinite=False, table=_byte_table(4, 7, {0x7F: _NAN, 0xFF: _NAN})),
        Format("float8_e5m2fnuz", 1, Sort.TABLE, table=_byte_table(5, 16, {0x80: _NAN})),
        Format("float8_e4m3fnuz", 1, Sort.TABLE, table=_byte_table(4, 8, {0x80: _NAN})),
        Format("float8_e8m0fnu", 1, Sort.TABLE, table=tuple((2.0 ** (b - 127) if b < 255 else _NAN,) for b in range(256))),
        Format("float4_e2m1fn_x2", 1, Sort.TABLE, table=tuple((_FOUR[b & 15], _FOUR[b >> 4]) for b in range(256))),
    ]
    named = {f.name: f for f in floats}
    for name, part in (("complex128", "float64"), ("complex64", "float32"), ("complex32", "float16")):
        named[name] = Format(name, named[part].width, Sort.FLOAT, 2, named[part].top)
    for width in (1, 2, 4, 8):
        named[f"int{width * 8}"] = Format(f"int{width * 8}", width, Sort.SIGNED)
        named[f"uint{width * 8}"] = Format(f"uint{width * 8}", width, Sort.UNSIGNED)
    named["bool"] = Format("bool", 1, Sort.TABLE, table=tuple((float(b > 0),) for b in range(256)))
    named |= {n: Format(n, 1, Sort.UNSIGNED) for n in ("quint8", "quint4x2", "quint2x4", "bits8", "bits1x8", "bits2x4", "bits4x2")}
    named |= {"qint8": Format("qint8", 1, Sort.SIGNED), "qint32": Format("qint32", 4, Sort.SIGNED), "bits16": Format("bits16", 2, Sort.UNSIGNED)}
    named |= {f"{s}int{b}": Format(f"{s}int{b}", 1, Sort.UNSIGNED) for s in ("", "u") for b in range(1, 8)}
    return named


FORMATS = _formats()
