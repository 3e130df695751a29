def test_probe(proof):
    import sys; sys.path.insert(0, "/work/main/tests/sglang_cpu")
    print(proof)
    import json
    for l in (proof.run_dir/"metrics.jsonl").read_text().splitlines():
        r=json.loads(l); print({k:v for k,v in r.items() if k in("kind","step","loss","walk_accept_length","per_position_accuracy","lr","seconds")})
