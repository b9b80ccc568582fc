"""Workers that fail on purpose, at exact requests: ``kf.faults``. Its functions: ``kwflow.faults.injection``."""

from kwflow.faults.injection import Script as Script
from kwflow.faults.injection import Swarm as Swarm
from kwflow.faults.injection import Worker as Worker
from kwflow.faults.injection import carry_out as carry_out
from kwflow.faults.injection import clear as clear
from kwflow.faults.injection import heal as heal
from kwflow.faults.injection import hits as hits
from kwflow.faults.injection import inject as inject
from kwflow.faults.kinds import Corrupt as Corrupt
from kwflow.faults.kinds import Die as Die
from kwflow.faults.kinds import Drop as Drop
from kwflow.faults.kinds import Event as Event
from kwflow.faults.kinds import Expire as Expire
from kwflow.faults.kinds import Fault as Fault
from kwflow.faults.kinds import Freeze as Freeze
from kwflow.faults.kinds import Hang as Hang
from kwflow.faults.kinds import Latency as Latency
from kwflow.faults.kinds import OfRequests as OfRequests
from kwflow.faults.kinds import Raise as Raise
from kwflow.faults.kinds import Refuse as Refuse
from kwflow.faults.kinds import Slow as Slow
