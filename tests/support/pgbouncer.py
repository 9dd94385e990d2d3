"""A PgBouncer in front of a test PostgreSQL: a pooler that shares sessions among clients."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
from typing import final
from urllib.parse import urlsplit

from testproject.processes import HOST, OwnProcess, ServerNotFound


@final
class PgBouncer(OwnProcess):
    """Pools the connections to a server in transaction mode; a context manager.

    Args:
        server: URL of any database of the server.

    Raises:
        ServerNotFound: There is no pgbouncer to start.
    """

    def __init__(self, server: str) -> None:
        super().__init__("dlock-pgbouncer-")
        self._server = urlsplit(server)

    def url_for(self, url: str) -> str:
        """The URL of a database of the server, through the pooler."""
        return urlsplit(url)._replace(netloc=f"{self._server.username}@{HOST}:{self.port}").geturl()

    def _launch(self) -> None:
        program = shutil.which("pgbouncer", path=os.pathsep.join((os.defpath, "/usr/sbin")))
        if program is None:
            raise ServerNotFound("no PgBouncer: install the pgbouncer package")
        server, config, users = self._server, self.directory / "ini", self.directory / "users"
        users.write_text(f'"{server.username}" ""\n')
        password = f" password={server.password}" if server.password else ""
        config.write_text(
            f"[databases]\n* = host={server.hostname} port={server.port or 5432}{password}\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\nlogfile = {self.log}\n"
            "pool_mode = transaction\n"
        )
        command = [program, str(config)]
        if os.geteuid() == 0:
            # It refuses to run as root.
            nobody = pwd.getpwnam("nobody")
            for path in (self.directory, config, users):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
            command += ["--user", "nobody"]
        self._spawn(command)

    def _answers(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True
