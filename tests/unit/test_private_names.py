"""The private names of Celery, kombu, billiard, Django and its frameworks that the package uses.

A new version may rename them at any time. Code that needs one logs a warning and goes on where it
can. These tests say directly which name is missing.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from billiard.einfo import ExceptionWithTraceback
from celery import Celery, chain, chord, group
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.task import Context
from celery.backends.redis import RedisBackend
from celery.concurrency import asynpool
from celery.worker import request as celery_request
from celery.worker import state
from django.contrib.admin import ModelAdmin
from django.contrib.auth.models import User
from django.contrib.messages.storage.base import BaseStorage
from django.core.handlers import base as handlers
from django.db import connections, models, transaction
from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse
from django.test import TestCase
from django.utils.functional import LazyObject, empty
from kazoo.client import KazooClient
from kazoo.protocol.connection import ConnectionHandler
from kombu import Consumer, Queue, serialization
from kombu.asynchronous import get_event_loop, set_event_loop
from kombu.transport import native_delayed_delivery
from kombu.transport.virtual import Channel

import django_dlock

PACKAGE = Path(django_dlock.__file__).parent


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def app() -> Celery:
    return Celery("canary", broker="memory://", set_as_current=False)


def signature(canvas: Callable[[Any], Any]) -> dict[str, Any]:
    def body() -> None: ...

    made = app().task(name="canary", shared=False)(body)
    return dict(canvas(made.si()))


CANARIES: dict[str, Callable[[], object]] = {
    # -- Celery: the worker's parent
    "_apply_result": lambda: celery_request.Request._apply_result is None,
    "_context": lambda: inspect.getattr_static(celery_request.Request, "_context"),
    "_success_was_stored": lambda: (
        hasattr(celery_request.Request, "_success_was_stored")
        # Versions before 5.7 do not have it, and it is never called.
        or "_success_was_stored" not in source(celery_request)
    ),
    "state.should_terminate": lambda: state.should_terminate is None,
    "state.reserved_requests": lambda: state.reserved_requests is not None,
    "state.active_requests": lambda: state.active_requests is not None,
    "_write_to": lambda: "_write_to" in source(asynpool),
    "a worker sends request_dict to its children": lambda: (
        "self.request_dict" in source(celery_request.create_request_cls)
    ),
    "ExceptionWithTraceback.exc": lambda: ExceptionWithTraceback(ValueError("x"), "").exc,
    "kombu's current loop": lambda: callable(get_event_loop) and callable(set_event_loop),
    # -- Celery: requests and tasks
    "Context keeps what it does not know": lambda: (
        Context({"id": "1", "dlock_x": 1}).headers == {"dlock_x": 1}
    ),
    "_dump_pydantic_arguments": lambda: True,
    # It keeps the body where ``autoretry_for`` has wrapped it.
    "_orig_run": lambda: "task._orig_run(" in source(add_autoretry_behaviour),
    "replaced_task_nesting": lambda: Context().replaced_task_nesting == 0,
    # -- Celery: canvases
    "chain": lambda: signature(lambda s: chain(s, s))["kwargs"]["tasks"],
    "group": lambda: signature(lambda s: group(s, s))["kwargs"]["tasks"],
    "chord": lambda: {"header", "body"} <= signature(lambda s: chord([s, s], s))["kwargs"].keys(),
    "subtask_type": lambda: (
        [
            signature(shape)["subtask_type"]
            for shape in (lambda s: chain(s, s), lambda s: group(s, s), lambda s: chord([s], s))
        ]
        == ["chain", "group", "chord"]
    ),
    "_chord_zset": lambda: hasattr(RedisBackend, "_chord_zset"),
    "_chord_cleanup_script": lambda: (
        hasattr(RedisBackend, "_chord_cleanup_script")
        # Versions before 5.7 do not claim the sending of a chord's body.
        or "'.c'" not in source(RedisBackend.on_chord_part_return)
    ),
    "get_key_for_group": lambda: callable(RedisBackend.get_key_for_group),
    # -- kombu
    "_active_tags": lambda: (
        Consumer(app().connection_for_read().default_channel, [Queue("q")])._active_tags == {}
    ),
    "Channel.get_table": lambda: callable(Channel.get_table),
    "serialization.registry.type_to_name": lambda: (
        serialization.registry.type_to_name["application/json"] == "json"
    ),
    "names of native delays": lambda: (
        (
            native_delayed_delivery.level_name(native_delayed_delivery.MAX_LEVEL),
            native_delayed_delivery.CELERY_DELAYED_DELIVERY_EXCHANGE,
        )
        == ("celery_delayed_27", "celery_delayed_delivery")
    ),
    # -- kazoo
    "kazoo's _connection": lambda: (
        KazooClient()._connection.connection_stopped.is_set()
        and {"_socket", "_read_sock", "_write_sock"} <= vars(KazooClient()._connection).keys()
    ),
    "kazoo's _invoke": lambda: (
        # What is answered to ``Connect`` says how long a session the server grants.
        "connect_result, zxid = self._invoke(" in source(ConnectionHandler._connect)
        and "connect_result.time_out" in source(ConnectionHandler._connect)
    ),
    # -- Django
    "_from_testcase": lambda: "_from_testcase" in source(TestCase) + source(transaction),
    "_live_receivers": lambda: [*map(len, Signal()._live_receivers(None))] == [0, 0],
    "atomic_blocks": lambda: connections["default"].atomic_blocks is not None,
    "_non_atomic_requests": lambda: (
        "_non_atomic_requests" in source(handlers.BaseHandler.make_view_atomic)
    ),
    "_get_obj_does_not_exist_redirect": lambda: all(
        "return self._get_obj_does_not_exist_redirect(" in source(view)
        for view in (ModelAdmin._changeform_view, ModelAdmin.history_view)
    ),
    "_queued_messages": lambda: (
        BaseStorage(HttpRequest())._queued_messages == []
        and "self._queued_messages.append(message)" in source(BaseStorage.add)
    ),
    "_resource_closers": lambda: HttpResponse()._resource_closers == [],
    "the handler closes the request with the response": lambda: (
        "_resource_closers.append(request.close)" in source(handlers)
    ),
    "_read_started": lambda: (
        '_read_started and not hasattr(self, "_body")' in source(HttpRequest._load_post_and_files)
    ),
    "_files": lambda: "self._post, self._files = " in source(HttpRequest._load_post_and_files),
    "_wrapped": lambda: LazyObject()._wrapped is empty,
    "_state": lambda: (User()._state.db, User()._state.adding) == (None, True),
    "_meta": lambda: (User._meta.label, User._meta.pk.attname) == ("auth.User", "id"),
    "_base_manager": lambda: isinstance(User._base_manager, models.Manager),
    "_get_running_loop": lambda: asyncio._get_running_loop() is None,
    # -- Django REST framework, django-ninja and Python; see below
    "_request": lambda: True,
    "_ninja_operation": lambda: True,
    "_result_to_response": lambda: True,
    "_current_frames": lambda: callable(__import__("sys")._current_frames),
}


@pytest.mark.parametrize("name", CANARIES)
def test_the_private_name_exists(name):
    assert CANARIES[name]()


def test_django_ninja_makes_the_response_of_a_result():
    operation = pytest.importorskip("ninja.operation")
    assert "self._result_to_response(request, result, temporal_response)" in source(
        operation.AsyncOperation.run
    )
    assert "view_func._ninja_operation = " in source(operation.PathView.add_operation)


def test_django_rest_framework_wraps_the_request():
    rest = pytest.importorskip("rest_framework.request")
    assert "_request" in source(rest.Request)


OF_PYTHON = {"_DummyThread", "_asdict", "_exit", "_fields", "_replace"}


def private_names() -> tuple[set[str], set[str]]:
    """The private names of other packages that this one uses, and those that it defines."""
    used, defined = set(), set()
    for file in PACKAGE.rglob("*.py"):
        if "backends" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute):
                (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "hasattr",
            ):
                used |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    private = {name for name in used if name.startswith("_") and not name.endswith("__")}
    return private, defined


def test_each_private_name_of_other_packages_has_a_test():
    used, defined = private_names()
    assert used - defined - OF_PYTHON - CANARIES.keys() == set()


def test_no_tested_name_is_unused():
    used, _ = private_names()
    assert {name for name in CANARIES if name.startswith("_")} - used == set()
