"""What every call site of an engine has to declare."""

from tk_serving.operator import operators


def check(sites) -> None:
    names = {op.name for op in operators()}
    for site in sites:
        assert site.why, site.name
        assert site.how, site.name
        assert site.until, site.name
        assert set(site.operators) <= names
        assert site.name not in names, "TK_SERVING_DISABLE could not tell them apart"
