import os, time
def add(a, b): return {"sum": a + b}
def crash(): os.abort()
def hang(): time.sleep(100)
