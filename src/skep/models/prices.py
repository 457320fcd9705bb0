"""What a call cost, by the published prices; a call that cannot be priced has no price, which is not zero."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from skep.models.spec import ModelSpec

if TYPE_CHECKING:
    from pydantic_ai.usage import RequestUsage


@dataclass(frozen=True, slots=True)
class Spend:
    """The tokens of one call and their price in US dollars: None where it is not known."""

    provider: str
    model: str
    input_tokens: int
    output_tokens: int
    usd: Decimal | None

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


def spend_of(spec: ModelSpec, usage: RequestUsage) -> Spend:
    usd = Decimal(0) if spec.is_scripted else _price(spec, usage)
    return Spend(spec.provider, spec.title, usage.input_tokens, usage.output_tokens, usd)


def _price(spec: ModelSpec, usage: RequestUsage) -> Decimal | None:
    if not usage.has_values() or usage.unmeasured_requests:
        return None
    # A known address tells better who is paid than the provider's name: many services speak OpenAI's protocol.
    by_address = _listed(spec, usage, address=spec.base_url) if spec.base_url else None
    return by_address if by_address is not None else _listed(spec, usage)


def _listed(spec: ModelSpec, usage: RequestUsage, *, address: str | None = None) -> Decimal | None:
    from genai_prices import calc_price

    try:
        if address is not None:
            return calc_price(usage, spec.id, provider_api_url=address).total_price
        return calc_price(usage, spec.id, provider_id=spec.provider).total_price
    except LookupError:
        return None
