"""Django's backend for MySQL over PyMySQL, beside the one over mysqlclient in the same process.

A project replaces mysqlclient with ``pymysql.install_as_MySQLdb()``. Here, the modules of Django's
backend are loaded a second time, and find PyMySQL under that name while they are.
"""

import importlib
import sys

import pymysql
from django.db.backends import mysql

__path__ = list(mysql.__path__)


def _load() -> None:
    def taken_out() -> dict[str, object]:
        names = [name for name in sys.modules if name.split(".")[0] == "MySQLdb"]
        return {name: sys.modules.pop(name) for name in names}

    others = taken_out()
    try:
        pymysql.install_as_MySQLdb()
        importlib.import_module(f"{__name__}.base")
    finally:
        taken_out()
        sys.modules.update(others)


_load()
