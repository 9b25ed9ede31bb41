"""The printable characters that byte-level BPE writes for the 256 bytes (GPT-2, `bytes_to_unicode`)."""


def byte_alphabet() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
