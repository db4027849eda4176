"""Units of an answer: their names, and the units and quantities that an answer has. This module does not import the
rewards' libraries.
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{")
# ``unit_named`` also removes a final s, so "inches" becomes "inche".
_UNIT_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb pound",
    "oz": "oz ounce",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "degC": "degc",
    "degF": "degf",
    "USD": "usd dollar",
    "EUR": "eur euro",
    "GBP": "gbp",
}
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
_UNIT_AND_POWER = r"[a-zA-Z]+(?:\^\{?\d\}?)?"
UNITS = rf"{_UNIT_AND_POWER}(?:\s*(?:/|\bper\b)\s*{_UNIT_AND_POWER})*"
"""Units, each perhaps with a power: ``m/s``, ``cm^2``."""
_UNITS_AFTER_NUMBER = re.compile(
    rf"[\d}})\]]\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{{\s*)?({UNITS})(?:\s+[a-z ]+)?\.?\s*\}}?(?:\^\{{?(\d)\}}?)?$"
)
_LONGEST_UNIT = 60
"""Largest number of characters at the end of an answer that are searched for units."""
_UNIT = re.compile(r"([a-zA-Z]+)(?:\^\{?(\d)\}?)?")


def unit_of(text: str) -> tuple[tuple[str, str], ...] | None:
    """The units after a number, each with its power: ``(("cm", "2"),)``. None for no unit, or an unknown unit."""
    # A unit is short, and the search takes quadratic time.
    match = _UNITS_AFTER_NUMBER.search(text[-_LONGEST_UNIT:])
    if match is None:
        return None
    return units_named(match[1], match[2])


def units_named(text: str, last_power: str | None = None) -> tuple[tuple[str, str], ...] | None:
    """The units of ``UNITS`` with their powers. None if one of them is unknown."""
    units: list[tuple[str, str]] = []
    for part in re.split(r"/|\bper\b", text):
        match = _UNIT.fullmatch(part.strip())
        unit = unit_named(match[1]) if match else None
        if match is None or unit is None:
            return None
        units.append((unit, match[2] or "1"))
    if last_power is not None:
        units[-1] = (units[-1][0], last_power)
    return tuple(units)


def unit_named(name: str) -> str | None:
    """The unit with this name or abbreviation, singular or plural; None for an unknown name."""
    name = name.lower()
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))


_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")


def quantities_of(text: str) -> tuple[tuple[str, str], ...] | None:
    """The numbers and units of ``2 hours 20 minutes``; None unless the text has several numbers, each with its unit."""
    plain = _TEXT.sub(" ", text).replace("}", " ").casefold()
    plain = re.sub(r"\band\b|[\s,\\]", "", plain)
    quantities = _QUANTITY.findall(plain)
    if len(quantities) < 2 or "".join(number + name for number, name in quantities) != plain:
        return None
    units = [(number, unit_named(name)) for number, name in quantities]
    if any(unit is None for _, unit in units):
        return None
    return tuple((number, unit or "") for number, unit in units)
