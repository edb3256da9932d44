"""The one renderer of chats and tool schemas, and the one parser of tool calls.

Fine-tuning and evaluation both draw chats with `Renderer` and read calls with `parse_calls`,
so a model is never measured in another format than the one it was taught.
"""

from gatewright.chat.parser import MAX_CHARS, STYLES, Call, Parsed, parse_calls
from gatewright.chat.renderer import Encoded, Renderer
from gatewright.chat.template import (
    CONTROL_TOKENS,
    END_OF_DOCUMENT,
    PAD,
    SPECIAL_TOKENS,
    STRUCTURE_TOKENS,
    TEMPLATE,
    TURN_END,
    TURN_START,
)

__all__ = [
    "CONTROL_TOKENS",
    "END_OF_DOCUMENT",
    "MAX_CHARS",
    "PAD",
    "SPECIAL_TOKENS",
    "STRUCTURE_TOKENS",
    "STYLES",
    "TEMPLATE",
    "TURN_END",
    "TURN_START",
    "Call",
    "Encoded",
    "Parsed",
    "Renderer",
    "parse_calls",
]
