"""The tenants."""

from __future__ import annotations

from django_tenants.models import DomainMixin, TenantMixin


class Client(TenantMixin):
    auto_create_schema = True


class Domain(DomainMixin):
    pass
