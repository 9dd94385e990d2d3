"""Which fields of a key a visitor chooses."""

from __future__ import annotations

import re

# What a server has not verified. Of META, that are the headers and the URL; REMOTE_USER, for
# instance, comes from the server.
_CHOSEN = re.compile(
    r"request\.(_request\.)?("
    r"(GET|POST|FILES|headers|body|data|query_params|path|path_info|method|content_type)\b"
    r"|META\.(HTTP_|CONTENT_|QUERY_STRING|PATH_INFO|REQUEST_|RAW_URI))"
)


def is_chosen(field: str) -> bool:
    """Whether a visitor can choose the value: an argument of the URL, or part of the request."""
    path = ".".join(re.findall(r"[^.\[\]]+", field))
    return path.partition(".")[0] != "request" or _CHOSEN.match(path) is not None
