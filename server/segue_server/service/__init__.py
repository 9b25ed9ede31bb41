"""What each call means. The transport translates to and from it, and the engine does what it orders.

Runs on the event loop; nothing here waits for anything but the engine's answers and the reader of a stream.

base.py            what all calls share
turn_calls.py      GenerationService
session_calls.py   SessionService, and transfer_calls.py the part of it that moves KV
service.py         descriptions, start, expiry and drain
"""

from segue_server.service.base import CAPABILITIES
from segue_server.service.service import Service
from segue_server.service.turn_calls import Turn

__all__ = ["CAPABILITIES", "Service", "Turn"]
