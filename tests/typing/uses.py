"""User code that ``mypy --strict`` must accept."""

from __future__ import annotations

import datetime as dt
from typing import Any

from celery import Celery, shared_task
from django.contrib.auth.decorators import login_required
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.test import SimpleTestCase
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from ninja import NinjaAPI
from typing_extensions import assert_type

from django_dlock import (
    BackendUnavailable,
    BodyField,
    LeaseLost,
    Lock,
    LockedTask,
    LockError,
    LockNotAcquired,
    StaleToken,
    idempotent_view,
    locked,
    locked_view,
    locks,
)
from django_dlock.lease import LeaseInfo
from django_dlock.management import LockedCommand
from django_dlock.templatetags.dlock import idempotency_key
from django_dlock.testing import local_locks
from testproject.shop.models import Stock


def holds_a_lock() -> int:
    with Lock("invoice:42", ttl=dt.timedelta(minutes=1), wait=None) as lock:
        assert_type(lock, Lock)
        lock.check()
        assert_type(lock.remaining, float)
        assert_type(lock.held, bool)
        token = lock.token
        assert_type(token, int | None)
        return token or 0


def tries() -> bool:
    lock = Lock("report:daily", ttl=300, renew=False, using="default", metadata={"by": "me"})
    assert_type(lock.acquire(blocking=False), bool)
    if lock.acquire(timeout=1.5):
        lock.renew()
        lock.release()
    return lock.lost


def told(lock: Lock, reason: str) -> None:
    print(lock.name, reason)


def catches() -> None:
    try:
        with Lock("stock:7", max_hold=900, on_lost=told, hold_until="commit"):
            pass
    except LockNotAcquired as error:
        assert_type(error.name, str)
    except LeaseLost as error:
        assert_type(error.reason, str)
    except BackendUnavailable as error:
        base: LockError = error
        print(base.alias)


async def feeds() -> bool:
    async with Lock("feed:9") as lock:
        assert_type(lock, Lock)
    assert_type(await lock.aacquire(timeout=2), bool)
    await lock.arelease()
    return await lock.alocked()


@locked("rebuild:{account_id}", wait=0)
def rebuild(account_id: int, full: bool = False) -> str:
    return f"{account_id} {full}"


@locked("sync:{account_id}")
async def synchronise(account_id: int) -> list[int]:
    return [account_id]


async def decorated_functions_keep_their_signatures() -> None:
    assert_type(rebuild(7, full=True), str)
    assert_type(await synchronise(account_id=7), list[int])


@locked_view("checkout:{request.user.pk}")
def checkout(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@locked_view(["request.user.pk", "number"], stream_max_hold=60)
def by_list(request: HttpRequest, number: str) -> HttpResponse:
    return HttpResponse(number)


async def may_see(request: HttpRequest) -> bool:
    return True


@idempotent_view(
    replay_if=may_see, store_cookies=True, client=["request.user.pk"], on_disconnect="cancel"
)
async def repeated(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@idempotent_view(key=BodyField("order_token"), if_contended="wait", wait=5, done_if="redirect")
def form(request: HttpRequest) -> HttpResponse:
    return HttpResponse(idempotency_key())


@idempotent_view(key=["number"], payload=["event.id"], done_if=lambda response: True)
def webhook(request: HttpRequest, number: str) -> HttpResponse:
    return HttpResponse(number)


@locked_view("order:{number}", if_contended="wait", wait=5, status=423, on_disconnect="cancel")
async def order(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(str(number))


@login_required
@require_POST
@locked_view("report:{number}")
@idempotent_view
@csrf_exempt
def report(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(str(number))


api = NinjaAPI()


@api.post("/refunds")
@locked_view("refund:{number}")
@idempotent_view(required=True)
async def refund(request: HttpRequest, number: int) -> dict[str, int]:
    return {"number": number}


async def decorated_views_keep_their_signatures(request: HttpRequest) -> None:
    assert_type(by_list(request, number="7"), HttpResponse)
    assert_type(report(request, number=7), HttpResponse)
    assert_type(await order(request, number=7), HttpResponse)
    assert_type(await refund(request, number=7), dict[str, int])
    assert_type(locked_view("cart")(Cart), type[Cart])
    assert_type(idempotent_view(Cart)().post(request, 7), HttpResponse)


@method_decorator(locked_view("cart:{number}"), name="dispatch")
class Cart(View):
    def post(self, request: HttpRequest, number: int) -> HttpResponse:
        return HttpResponse(str(number))


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order_id}",
    idempotency_key="{order_id}",
    atomic=True,
)
def charge(self: LockedTask, order_id: int) -> str:
    run = self.current_run
    if run is not None and run.lock is not None:
        assert_type(run.lock, Lock)
        run.lock.check()
    return f"{self.name} {order_id}"


class ImportAccount(LockedTask):
    name = "shop.import_account"
    lock_key = "import:{account_id}"
    if_contended = "skip"
    unique_until = "done"
    unique_ttl = dt.timedelta(hours=2)

    def run(self, account_id: int, since: str | None = None) -> None:
        print(account_id, since)


def registers(app: Celery) -> Any:
    return app.register_task(ImportAccount())


class Account(models.Model):
    name = models.CharField(max_length=20)

    class Meta:
        app_label = "typing_account"

    def __str__(self) -> str:
        return self.name

    def rename(self, name: str) -> None:
        with Lock(f"account:{self.pk}"):
            self.name = name
            self.save(update_fields=["name"])


def fences(stock: Stock) -> int:
    assert_type(stock.fence, int)
    with Lock(f"stock:{stock.article}") as lock:
        lock.fence(stock).save(update_fields=["count"])
        with lock.atomic(), lock.atomic(using="other"):
            pass
        try:
            return lock.fence(Stock.objects.filter(article=1), field="fence").update(count=1)
        except StaleToken as error:
            print(error.name)
    return lock.fence(Stock.objects).delete()[0]


async def fences_in_coroutines(stock: Stock) -> int:
    async with Lock(f"stock:{stock.article}") as lock:
        await lock.fence(stock).asave()
        return await lock.fence(Stock.objects.all()).aupdate(count=2)


class ImportFeed(LockedCommand):
    lock_key = "import:{feed}"
    lock_wait = 60
    lock_max_hold = dt.timedelta(hours=4)
    contended_exit_code = 75

    def handle(self, *args: Any, **options: Any) -> None:
        assert_type(self.lock, Lock)
        self.lock.check()


class ImportByCallable(LockedCommand):
    @staticmethod
    def lock_key(feed: str, **options: Any) -> str:
        return f"import:{feed}"


@local_locks(WAIT=0)
class ImportTests(SimpleTestCase):
    def test_it(self) -> None:
        with local_locks(), Lock("import:news"):
            pass


@local_locks()
def tests_a_function(number: int) -> int:
    return number


assert_type(tests_a_function(1), int)


def operates() -> list[str]:
    infos = locks["default"].list(prefix="invoice:", limit=10)
    assert_type(infos, list[LeaseInfo])
    for info in infos:
        assert_type(locks["default"].break_(info.name, owner=info.owner), bool)
    return sorted(locks)
