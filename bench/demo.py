"""`make demo`: start the server on the packaged SmolLM2, hold a two-turn conversation, show what the session saved.

Everything shown is read from the outside: the turns through the gRPC client, the cache bytes from /metrics.
"""

import re
import sys
import time

from _server import START_TIMEOUT, read, running_server

from segue_client import Client, Session, Turn

QUESTIONS = ("What is the capital of France?", "What is it famous for?")


def main() -> int:
    began = time.monotonic()
    with running_server() as addresses, Client(addresses.grpc) as client:
        client.wait_ready(START_TIMEOUT)
        model = client.model_info()
        print(f"serving {model.model_id}: {model.parameter_count / 1e6:.1f} M parameters, {model.weight_dtype},")
        print(f"{model.kv_bytes_per_token:,} bytes of KV a token, ready after {time.monotonic() - began:.1f} s\n")
        session = client.create_session(system="You are a helpful AI assistant.")
        print(f"session {session.id} holds a system prompt of {session.position} tokens\n")
        for question in QUESTIONS:
            converse(session, question)
            show_cache(addresses.metrics)
        session.delete()
        print("the session is deleted:")
        show_cache(addresses.metrics)
    print("the server has stopped")
    return 0


def converse(session: Session, question: str) -> None:
    """One streamed turn, and where its tokens came from."""
    print(f"> {question}")
    with session.chat(question, temperature=0.0, max_tokens=80) as turn:
        for piece in turn:
            print(piece, end="", flush=True)
    print("\n")
    show_turn(turn)


def show_turn(turn: Turn) -> None:
    usage, timings = turn.usage, turn.timings
    decoded = usage.generated_tokens - 1
    rate = f"{decoded / timings.decode:.1f} tokens/s" if timings.decode else "-"
    print(f"  TTFT {(timings.time_to_first_token or 0) * 1e3:.0f} ms, then {rate}")
    print(f"  {usage.context_tokens} tokens of context + {usage.prompt_tokens} of prompt:")
    print(
        f"  {usage.computed_tokens} positions computed, {usage.session_reused_tokens} reused from the session's cache"
    )


def show_cache(metrics_url: str) -> None:
    """Cache bytes by class, as Prometheus sees them."""
    held = re.findall(r'^segue_kv_bytes\{class="(\w+)".*tier="device"\} (\S+)$', read(metrics_url), re.MULTILINE)
    shown = ", ".join(f"{name} {float(value):,.0f}" for name, value in held if float(value))
    print(f"  /metrics: segue_kv_bytes {shown or '0'}\n")


if __name__ == "__main__":
    sys.exit(main())
