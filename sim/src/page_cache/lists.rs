//! Doubly linked lists of chunks, like the kernel's LRU lists of folios.
//!
//! A chunk is on at most one list. The newest chunk is at the head. Every operation takes O(1) and allocates nothing.

use super::Chunk;

const NONE: u32 = u32::MAX;

/// The links from each chunk of a file to the next and the previous chunk of its list.
#[derive(Debug)]
pub struct ListLinks {
    next: Vec<u32>,
    previous: Vec<u32>,
}

/// A list of chunks: its ends and its length. [`ListLinks`] has the links between its chunks.
#[derive(Debug, Clone)]
pub struct ChunkList {
    head: u32,
    tail: u32,
    len: u32,
}

impl ListLinks {
    pub fn new(chunks: u32) -> Self {
        Self { next: vec![NONE; chunks as usize], previous: vec![NONE; chunks as usize] }
    }
}

impl ChunkList {
    pub fn new() -> Self {
        Self { head: NONE, tail: NONE, len: 0 }
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn oldest(&self) -> Option<Chunk> {
        (self.tail != NONE).then_some(self.tail)
    }

    pub fn newest(&self) -> Option<Chunk> {
        (self.head != NONE).then_some(self.head)
    }

    pub fn push_newest(&mut self, links: &mut ListLinks, chunk: Chunk) {
        links.previous[chunk as usize] = NONE;
        links.next[chunk as usize] = self.head;
        match self.head {
            NONE => self.tail = chunk,
            head => links.previous[head as usize] = chunk,
        }
        self.head = chunk;
        self.len += 1;
    }

    pub fn remove(&mut self, links: &mut ListLinks, chunk: Chunk) {
        let (previous, next) = (links.previous[chunk as usize], links.next[chunk as usize]);
        match previous {
            NONE => self.head = next,
            previous => links.next[previous as usize] = next,
        }
        match next {
            NONE => self.tail = previous,
            next => links.previous[next as usize] = previous,
        }
        self.len -= 1;
    }

    pub fn move_to_head(&mut self, links: &mut ListLinks, chunk: Chunk) {
        if self.head != chunk {
            self.remove(links, chunk);
            self.push_newest(links, chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_is_removed_first_unless_rotated() {
        let (mut links, mut list) = (ListLinks::new(4), ChunkList::new());
        for chunk in 0..4 {
            list.push_newest(&mut links, chunk);
        }
        list.move_to_head(&mut links, 0);
        list.remove(&mut links, 2);
        let mut order = Vec::new();
        while let Some(chunk) = list.oldest() {
            list.remove(&mut links, chunk);
            order.push(chunk);
        }
        assert_eq!(order, [1, 3, 0]);
        assert_eq!(list.len(), 0);
    }
}
