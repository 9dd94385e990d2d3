"""The shop's pages."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect

from django_dlock import locked_view

from .models import Effect, Order


def home(request: HttpRequest) -> HttpResponse:
    return redirect("admin:index")


@locked_view("order:{number}")
def charge(request: HttpRequest, number: int) -> HttpResponse:
    """Charge an order; a second click gets 409 while the first one is in progress."""
    order, _ = Order.objects.get_or_create(number=number)
    if not order.paid:
        Effect.objects.create(order_number=number, by="view")
        order.paid = True
        order.save(update_fields=["paid"])
    return JsonResponse({"order": order.number, "paid": order.paid})
