"""Which fields of a template are secrets of a request, so that no name may show them."""

from __future__ import annotations

import re

# The parts of a field, attributes and indexes alike, with dots between them. What leads to the
# request does not matter: REST framework wraps it, and a view has it as an attribute.
_SECRETS = {
    "the key of a session": r"session_key(\.|$) | (^|\.)session\.cache_key(\.|$) | _auth_user_hash",
    "a cookie": r"(^|\.)(?-i:COOKIES)(\.|$) | (^|\.)scope\.cookies(\.|$)",
    "a CSRF token": r"csrf | xsrf",
    "a password": r"(^|[._])password\d?(\.|$)",
    "an API token": r"""
        (^|\.)auth_token(\.|$)
        # The token of REST framework's TokenAuthentication is its primary key.
        | (^|\.)_?request\._?auth(\.(key|pk|token))?$
    """,
    "a token or key that gives access": r"""
        # Not every token does: those of forms and pages do not.
        (^|\.)((\w+_)?(access|auth|bearer|id|refresh|reset|session)_?)?token(\.|$)
        | (^|\.)(\w+_)?(secret | secret_?key | api_?key | access_?key | jwt)(\.|$)
        | (^|\.)(?-i:GET|POST|query_params|data)\.session_?id$
    """,
    "a header with credentials": r"""
        (^|\.)(META | environ | headers)\.
        .*(
            authorization | cookie | credential | jwt | oidc | passw | secret | session | token
            | (access | api | auth)[-_]?key | [-_]auth(\.|$)
        )
    """,
}
_PATTERNS = {
    what: re.compile(pattern, re.IGNORECASE | re.VERBOSE) for what, pattern in _SECRETS.items()
}


def secret_in(field: str) -> str:
    """What secret a field such as ``request.session.session_key`` is; empty if it is none."""
    path = ".".join(re.findall(r"[^.\[\]]+", field))
    return next((what for what, pattern in _PATTERNS.items() if pattern.search(path)), "")
