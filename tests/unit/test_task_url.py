"""``DLOCK_ADMIN``: where a task is shown."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dlock.checks import check_admin
from django_dlock.operators import task_url


@pytest.mark.parametrize(
    ("template", "address"),
    [
        ("https://flower.example.com/task/{task_id}", "https://flower.example.com/task/a%2Fb%3Fc"),
        ("http://127.0.0.1:5555/task/{task_id}", "http://127.0.0.1:5555/task/a%2Fb%3Fc"),
        (
            "https://example.com/?id={task_id}#{task_id}",
            "https://example.com/?id=a%2Fb%3Fc#a%2Fb%3Fc",
        ),
    ],
)
def test_the_id_is_put_into_the_address(settings, template, address):
    settings.DLOCK_ADMIN = {"TASK_URL": template}
    assert task_url.url_of_task("a/b?c") == address
    assert check_admin() == []


@pytest.mark.parametrize("task_id", [None, "", 7, ["a"]])
def test_a_value_that_is_no_id_has_no_address(settings, task_id):
    settings.DLOCK_ADMIN = {"TASK_URL": "https://example.com/{task_id}"}
    assert task_url.url_of_task(task_id) is None


@pytest.mark.parametrize("value", [None, {}, {"TASK_URL": None}])
def test_without_the_setting_there_are_no_addresses(settings, value):
    settings.DLOCK_ADMIN = value
    assert task_url.read() is task_url.url_of_task("a") is None
    assert check_admin() == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        7,
        "javascript:alert('{task_id}')",
        "//example.com/{task_id}",
        "ftp://example.com/{task_id}",
        "/task/{task_id}",
        "https:///{task_id}",
        "https://{task_id}/",
        "https://{task_id}.example.com/{task_id}",
        "https://example.com/",
        "https://example.com/{id}",
        "https://example.com/{task_id}/{}",
        "https://example.com/{task_id!r}",
        "https://example.com/{task_id",
        "https://[/{task_id}",
    ],
)
def test_a_wrong_address_is_an_error_of_the_check_and_makes_no_links(settings, url):
    settings.DLOCK_ADMIN = {"TASK_URL": url}
    with pytest.raises(ImproperlyConfigured, match="TASK_URL"):
        task_url.read()
    assert task_url.url_of_task("a") is None
    (error,) = check_admin()
    assert error.id == "django_dlock.E013"
    assert repr(url) in error.msg
    assert "http or https" in error.msg


@pytest.mark.parametrize(
    ("value", "told"),
    [(["TASK_URL"], "it takes a dict"), ({"FLOWER": "x"}, "it takes ['TASK_URL']")],
)
def test_other_values_are_errors_of_the_check(settings, value, told):
    settings.DLOCK_ADMIN = value
    (error,) = check_admin()
    assert told in error.msg
