"""Write docs/schema/row.schema.json, the published JSON Schema of a row of results.

python scripts/row_schema.py
"""

import json
from pathlib import Path

from poros.evidence.artifact import json_schema

FILE = Path(__file__).resolve().parent.parent / "docs" / "schema" / "row.schema.json"

if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(json_schema(), indent=2) + "\n")
