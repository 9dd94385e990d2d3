"""The demonstration: one stream of orders and faults, three ways to guard it, one table.

``python -m testproject.demo`` runs it to its end, ``python -m testproject.demo serve`` leaves
the site and its workers running. Needs Python and what is in the ``demo`` extra; starts and
stops everything else itself.
"""
