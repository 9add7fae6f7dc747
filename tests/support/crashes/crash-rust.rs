//! Reads a number, and crashes in a thread if it is 2: at an address that is not mapped.
mod shop {
    pub struct Ledger {
        pub orders: Vec<(String, usize)>,
    }

    impl Ledger {
        #[inline(never)]
        pub fn total(&self, key: usize) -> u64 {
            let (_, count) = &self.orders[key];
            // SAFETY: the address is aligned. Where nothing is mapped, the program crashes, as
            // it is meant to.
            unsafe { *(*count as *const u64) + 1 }
        }
    }
}

static FEW: u64 = 3;

fn main() {
    let few = std::ptr::from_ref(&FEW) as usize;
    let order = |name: &str, count| (name.to_owned(), count);
    let orders = vec![order("none", few), order("apples", few), order("pears", 16)];
    let ledger = shop::Ledger { orders };
    println!("crash: ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let key = line.trim().parse().unwrap();
    let worker = std::thread::spawn(move || println!("{}", ledger.total(key)));
    worker.join().unwrap();
}
